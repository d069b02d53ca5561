"""Losses for the trainers of sentence-transformers (tested with 5.7 and 6.2), with their constructors' words.

    from contrastile.integrations.sentence_transformers import CachedRankingLoss

    loss = CachedRankingLoss(model, mini_batch_size=64)
    trainer = SentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)

Each column of a batch goes through `encode`, in sub-batches of `mini_batch_size`, and the embeddings to `contrast`,
which holds no matrix of scores. Gradients reach autograd once per parameter and step, so DistributedDataParallel,
gradient accumulation and mixed precision work as for a loss without a cache.
"""

from contrastile.integrations.sentence_transformers.gist import CachedGISTLoss
from contrastile.integrations.sentence_transformers.multi_vector import CachedMultiVectorLoss
from contrastile.integrations.sentence_transformers.ranking import CachedRankingLoss, CachedSymmetricLoss

__all__ = ["CachedGISTLoss", "CachedMultiVectorLoss", "CachedRankingLoss", "CachedSymmetricLoss"]
