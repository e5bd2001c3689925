"""What tests need: functions on real ranks, comparison, named tolerances."""
