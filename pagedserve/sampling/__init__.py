"""From logits to tokens: what each row asked for, applied in one documented order.

raw logits -> logprobs are taken here -> masks of structured output -> logit_bias, allowed_token_ids, bad_words,
min_tokens, penalties -> temperature -> min_p -> top_k -> top_p -> draw. A row's result depends on its own logits,
parameters, seed and tokens, and never on the rows beside it.
"""
