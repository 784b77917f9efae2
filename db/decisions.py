"""Why a vote counts or does not. A new reason is a line here and its sentence in `app.views.words` (reason_<name>)."""

REASONS = {
    "identity": "a name or organisation of one of the two models stands in the conversation",
    "quarantine": "the visitor is in quarantine",
    "frequent_prompt": "the prompt was asked so often that only a sample of its votes counts",
    "imported": "the file that it came from does not count it",
    "recount": "what kept it from counting was taken back",
}
