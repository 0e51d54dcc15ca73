"""The computation of a rank's experts, the time it takes, and an emulated accelerator."""
