"""Generated from protos/genserve/v1 by scripts/protos; never edited."""
