"""everplex: exact, resumable perplexity of a language model over a large corpus."""
