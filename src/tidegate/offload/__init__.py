"""The engine. Needs torch only; knows no trainer."""
