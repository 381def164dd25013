"""The embedded engine: continuous batching on one device, with results that do not depend on the batch."""
