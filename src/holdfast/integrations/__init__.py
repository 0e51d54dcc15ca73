"""Models and trainers of other libraries, each an optional extra of the package.

They import only the names that `holdfast` exports, as a user's script does.

- `transformers`: `elastic_experts` replaces the experts of a Hugging Face MoE model by elastic ones, `plain_experts`
  converts them back.
- `torchtitan`: `ElasticTrainer` runs torchtitan's trainer on replicas that join and leave (docs/torchtitan.md).
"""
