"""A server that speaks SGLang's protocol over the embedded engine: the whole cluster path in CI, without a GPU."""
