"""Pre-training of a byte-level preset on the built-in problems: `python -m zmrl.model.pretrain --out DIR`.

On idle cores set `OMP_WAIT_POLICY=active`: torch's small operators then take about half the time (zmrl/__init__.py
lets idle threads sleep, for the sake of several processes).

Supervised training of the reference model in FP32 on the CPU: cross-entropy on the response only, on a mix of worked
and terse answers. Every forward runs on the weights that the checkpoint will hold: routed experts rounded to MXFP4, the
rest to BF16, with FP32 masters behind them and the gradient passed straight through (quantisation-aware training).
The indexer learns by DSA's KL loss to the attention distribution, from detached inputs and with its own gradient clip,
so it does not influence the model; MLA attends densely until `SPARSE_FROM` of the run and to the selection after that.

Until `UPCYCLE_AT` of the run the MoE layers hold only as many experts as a token chooses, so they are dense; then
those are copied to all experts (`upcycle`), which first compute the same function and then part ways. Most steps cost
what a dense model costs, and every expert has seen every token of them.

modules     `batches` (data and learning rate), `trainer` (one update), `upcycle`, `evaluation`, `__main__` (the run)
"""
