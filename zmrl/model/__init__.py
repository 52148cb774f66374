"""The Kimi K3.1 text model: configuration, checkpoint layout, tokenizer, reference implementation."""
