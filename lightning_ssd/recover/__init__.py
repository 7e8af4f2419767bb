"""`recover=True`: a training that was killed continues with the step after the last recorded one.

- `recovery` makes the records, and restores them;
- `replay_loader` restores the position in the data.
"""

from lightning_ssd.recover.recovery import Recovery, training_settings
