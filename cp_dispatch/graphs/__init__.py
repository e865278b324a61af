"""What compiled and captured graphs, and checkpoints, need beside the ops."""
