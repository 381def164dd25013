"""The engine behind which SGLang generates: launched from the recipe, spoken to over HTTP. Opened by `open.py`."""
