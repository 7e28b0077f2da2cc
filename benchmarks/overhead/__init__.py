"""What a step costs beside a hand-written loop: with the Trainer, and with other trainers."""
