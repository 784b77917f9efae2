"""The paper's experiments, on the engine's own scheduler and pool.

`simulation` runs the real scheduler and the real bookkeeping of the pool; only the forward is left out, so that any
model on any machine can be asked for (`machines`), under any load (`traces`). `experiments` are those of the paper
(PagedAttention, SOSP 2023), each beside what the paper prints; `report` writes them down. `real` and `growth` measure
the real engine with its real kernels.
"""
