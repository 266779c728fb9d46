"""The harness: plan a lane, run it, keep its drop, judge the drop from its logs."""
