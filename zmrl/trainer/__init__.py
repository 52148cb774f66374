"""The training side: verl's trainer and its plug-ins, the checker, and the Megatron host."""
