"""What tests share: tiny models, corpora, servers and oracles."""
