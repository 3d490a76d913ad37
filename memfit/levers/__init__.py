"""What can be traded for memory or speed: each lever says what its choices are and applies one to a model."""
