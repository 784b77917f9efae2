"""Which votes deserve to count: tests of visitors and of prompts. Pure: votes in, findings out; decides nothing."""
