"""Problems, prompts and data sets."""
