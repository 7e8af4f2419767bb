"""Remedies for a lack of memory that several log lines and errors name."""

SMALLER = "Use smaller micro-batches, with `accumulate_grad_batches` for as large steps"

CHUNKED_LOSS = (
    "a loss in chunks of tokens, as logits of all tokens need several times their bytes "
    "(`torch.nn.functional.linear_cross_entropy`, or `chunked_loss` of the recipes' models)"
)
