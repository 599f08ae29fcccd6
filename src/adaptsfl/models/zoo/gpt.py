"""A small GPT: token and position embeddings, causal pre-norm blocks, logits of the next token at every position."""

import torch
from torch import Tensor, nn

from adaptsfl import checks
from adaptsfl.models.zoo.parts import TransformerBlock, flag, scaled, share


class GPT(nn.Module):
    """A decoder-only transformer over at most `context` tokens."""

    def __init__(self, *, vocabulary: int, dim: int, depth: int, context: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(dim, causal=True, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the next token's logits, (batch, tokens, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt(
    *,
    vocabulary: int = 256,
    width: float = 1.0,
    depth: int = 4,
    context: int = 64,
    dropout: float = 0.1,
    tied: bool = False,
) -> GPT:
    """Small GPT: 128 wide, 4 blocks, bytes as tokens. `tied` shares embedding and head, which leaves no legal cut."""
    return GPT(
        vocabulary=checks.whole_number("vocabulary", vocabulary),
        dim=scaled(128, width),
        depth=checks.whole_number("depth", depth),
        context=checks.whole_number("context", context),
        dropout=share("dropout", dropout),
        tied=flag("tied", tied),
    )
