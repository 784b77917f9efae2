"""The inference server: tokens in, tokens out, from one pool of KV pages. Knows no visitor, no battle, no database.

Read in this order: `server` (HTTP), `core` (the step loop), `scheduler`, `kv/` (who holds which page), then
`architectures/`.
"""
