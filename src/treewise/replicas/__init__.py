"""Many engines behind one door: processes on one machine or many, through Ray."""
