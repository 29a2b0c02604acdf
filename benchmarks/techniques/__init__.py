"""What each technique gave on four small sets, and which epoch is best kept: tables of the recorded runs."""
