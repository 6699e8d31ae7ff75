"""examples/transformers_trainer.py trains, saves sharded checkpoints, and goes on from the first with a new model."""

import sys

import transformers_trainer

sys.argv[1:] = ["--out", "out"]
transformers_trainer.main()
sys.argv[1:] = ["--out", "out", "--resume", "out/checkpoint-3"]
transformers_trainer.main()
