"""Parameters, and floating point operations per token, from a model's dimensions alone."""

from typing import Protocol


class DecoderArgs(Protocol):
    """The dimensions that the counts need."""

    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


def num_block_matmul_params(args: DecoderArgs) -> int:
    """Parameters of one block that are factors of a matrix product."""
    attention = 2 * args.dim * args.head_dim * (args.n_heads + args.n_kv_heads)
    return attention + 3 * args.dim * args.hidden_dim


def num_params(args: DecoderArgs) -> int:
    """All parameters; tied embeddings count once."""
    embeddings = args.vocab_size * args.dim * (1 if args.tie_embeddings else 2)
    norms = args.dim * (2 * args.n_layers + 1)
    return embeddings + norms + args.n_layers * num_block_matmul_params(args)


def flops_per_token(args: DecoderArgs, seq_len: int) -> int:
    """Floating point operations of forward and backward, per token of a sequence of `seq_len`.

    Matrix products only, a multiply-add as two: 6 per parameter in one (2 forward, 4 backward; the
    embedding is a look-up, the output projection is not), plus 12 * D * S a layer for attention's
    two products of queries with keys and weights with values, counted as if not causal. That is
    the convention of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and of torchtitan;
    recomputation by activation checkpointing does not count.
    """
    matmul_params = args.n_layers * num_block_matmul_params(args) + args.vocab_size * args.dim
    return 6 * matmul_params + 12 * args.n_layers * args.n_heads * args.head_dim * seq_len
