"""The tables and figures of the DeFT paper."""
