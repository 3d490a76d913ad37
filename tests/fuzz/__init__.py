"""A grammar of training scripts: one integer is one script, run as it is and with memfit's line."""
