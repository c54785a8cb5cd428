"""Train with torchtitan: ``checkpointless run --nproc-per-node 8 examples/train_torchtitan.py --module ...``.

This is torchtitan's ``train.py`` with a decorator, and ``train(trainer)`` in the place of ``trainer.train()``.
"""

from torchtitan.config import ConfigManager
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import init_logger

from checkpointless import HPWrapper
from checkpointless.integrations.torchtitan import train


@HPWrapper()
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    init_logger()
    config = ConfigManager().parse_args()
    sl.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    trainer = config.build()
    try:
        train(trainer)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
