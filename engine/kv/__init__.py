"""KV memory: one pool of pages that every checkpoint shares.

Read in this order: `geometry` (how many pages a block takes), `pool` (pages), `blocks` (bundles of pages, counted and
cached), `prefix_cache` (which blocks hold a given prefix), `manager` (what each sequence holds).
"""
