"""Draft heads that others have trained, in their projects' formats: EAGLE-3 (eagle3.py), DFlash,
DSpark and JetSpec (block.py), and MTP heads in a model's own file (mtp.py). hf/published_heads.py
loads them. What they share is in base.py."""
