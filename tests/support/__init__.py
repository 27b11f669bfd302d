"""What tests share: daemons in processes of their own, scripted engines, tiny checkpoints, faults and their oracle."""
