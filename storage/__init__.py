"""The object store: local folders and fsspec URLs, retries, codecs, errors. Knows nothing of perplexity."""
