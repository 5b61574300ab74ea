"""The nouns (records) and one module per verb: plan, evaluate, write, reduce, report, with their helpers."""
