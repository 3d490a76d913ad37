"""Several processes that train one model together: joining them, agreeing, adding up gradients."""
