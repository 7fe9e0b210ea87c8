"""The paper's tables and figures, each from one command."""
