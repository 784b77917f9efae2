"""Looks of the Gradio controls. Every value is one of the tokens of static/css/tokens.css, so that light, dark and the
toggle between them are decided in one place, by that file alone.
"""

from __future__ import annotations

import gradio as gr

TOKENS = {
    "body_background_fill": "var(--bg)",
    "body_text_color": "var(--ink)",
    "body_text_color_subdued": "var(--ink-2)",
    "background_fill_primary": "var(--surface)",
    "background_fill_secondary": "var(--bg)",
    "block_background_fill": "var(--surface)",
    "block_border_color": "var(--line)",
    "block_label_background_fill": "var(--surface)",
    "block_label_text_color": "var(--ink-2)",
    "block_title_text_color": "var(--ink)",
    "block_info_text_color": "var(--ink-2)",
    "border_color_primary": "var(--line)",
    "border_color_accent": "var(--line-strong)",
    "color_accent_soft": "var(--sunken)",
    "input_background_fill": "var(--surface)",
    "input_border_color": "var(--line-strong)",
    "input_border_color_focus": "var(--focus)",
    "input_placeholder_color": "var(--ink-3)",
    "button_primary_background_fill": "var(--ink)",
    "button_primary_background_fill_hover": "var(--ink-hover)",
    "button_primary_text_color": "var(--bg)",
    "button_secondary_background_fill": "var(--surface)",
    "button_secondary_background_fill_hover": "var(--sunken)",
    "button_secondary_border_color": "var(--line-strong)",
    "button_secondary_text_color": "var(--ink)",
    "error_background_fill": "var(--bad-soft)",
    "error_border_color": "var(--bad)",
    "error_text_color": "var(--bad)",
    "link_text_color": "var(--link)",
    "panel_background_fill": "var(--surface)",
    "slider_color": "var(--ink)",
    "stat_background_fill": "var(--sunken)",
    "table_border_color": "var(--line)",
}


def theme() -> gr.themes.Base:
    own = gr.themes.Base(font=["var(--sans)"], font_mono=["var(--mono)"], radius_size="md", text_size="md")
    both = {f"{name}_dark": value for name, value in TOKENS.items() if hasattr(own, f"{name}_dark")}
    return own.set(
        **TOKENS,
        **both,
        block_border_width="0px",
        block_shadow="none",
        block_title_text_weight="600",
        block_title_text_size="0.875rem",
        button_large_text_weight="600",
        button_small_text_weight="500",
        input_border_width="1px",
        input_shadow="none",
        input_shadow_focus="none",
        layout_gap="12px",
    )
