"""From files to token batches: sources, record formats, tokenization, resumable sampling and collation."""
