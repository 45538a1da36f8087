"""Who owns which KV block: pools, tables, prefix sharing. `manager.KVCacheManager` is the face of this room.

Two samples of one prompt, blocks of 4 tokens, the prompt being "a b c d e f":

    prompt computed            forked: nothing moves          both draw a token
    A: [7: a b c d] [2: e f]   A: [7] [2]   7 and 2 are       A: [7] [2: e f x]   the last owner writes in place
                               B: [7] [2]   held twice        B: [7] [5: e f y]   the first writer got a copy of 2

Full blocks are shared for good; only a last block that is still being filled is ever copied, once for each sequence but
one. A block is free when nobody holds it, and can be found again by its content until its space is needed. A prompt
that goes on within a block as another did shares that block's beginning in the same way.
"""
