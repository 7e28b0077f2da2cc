"""LightningModules and LightningDataModules, run as they are; and a task of ours as one."""
