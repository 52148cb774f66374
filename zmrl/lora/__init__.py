"""Adapters outside of a host: their initial values, and the PEFT directory format."""
