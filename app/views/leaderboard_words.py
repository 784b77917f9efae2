"""The sentences of the leaderboard's tabs, filters, plots and downloads; `app.views.words` takes them in."""

from __future__ import annotations

from app.leaderboard.votes import RULES
from app.ratings.categories import CATEGORIES, HARD_SIGNS, LONG_TOKENS

TABLE: dict[str, tuple[str, str]] = {
    "tabs_label": ("Which votes", "选择投票"),
    "category_all": ("All votes", "全部投票"),
    "category_english": ("English", "英文"),
    "category_chinese": ("Chinese", "中文"),
    "category_other": ("Other languages", "其他语言"),
    "category_code": ("Code", "代码"),
    "category_multi_turn": ("Multi-turn", "多轮"),
    "category_long": ("Long prompts", "长提示"),
    "category_hard": ("Hard prompts", "难题"),
    # by which rule a vote is of a category (app/ratings/categories.py)
    **{
        f"rule_of_{category}": (CATEGORIES[category].rule, chinese)
        for category, chinese in {
            "english": "提示中的常用词大多是英文。",
            "chinese": "提示的文字中汉字超过 30%。",
            "other": "可以识别语言，且既不是英文也不是中文。",
            "code": "提示或回答中有代码块，或有像代码那样开头的行。",
            "multi_turn": "对话中有两个或更多问题。",
            "long": f"提示不少于 {LONG_TOKENS} 个词元：四个字符算一个词元，中日韩文字每字算一个。",
            "hard": f"第一个提示符合以下 {HARD_SIGNS} 项或更多：要求步骤或理由；设定限制；含数字或公式；"
            "含代码；由几部分组成；不少于 40 个词。",
        }.items()
    },
    # why there is no such view, by rule (app/leaderboard/votes.py)
    **{
        f"rule_{rule}": (RULES[rule], chinese)
        for rule, chinese in {
            "no_method": "没有评分方法 {value}；可用的有 {names}。",
            "no_interval": "{method} 没有 {value} 区间；可用的有 {names}。",
            "no_category": "没有类别 {value}；可用的有 {names}。",
            "no_covariates": "{method} 无法固定风格或位置的影响。",
            "no_weights": "{method} 无法给投票加权。",
            "no_clusters": "只有 sandwich 区间能考虑访客。",
            "no_days": "从 {since} 到 {until} 不是一段时间。",
            "least_votes": "最少票数须为 0 或更多。",
            "no_day": "{value} 不是日期；请写成 2026-01-31 的形式。",
            "no_number": "{value} 不是票数。",
            "no_switch": "{value} 既不是 0 也不是 1。",
            "no_texts": "这些投票不带对话，因此没有类别。",
            "no_times": "这些投票不带时间。",
            "no_visitors": "这些投票没有说明由谁投出。",
            "no_style": "这些投票不带回答，因此没有风格。",
            "no_chances": "并非每张票都记有其组合被抽中的概率。",
        }.items()
    },
    "switch_style": ("Style control", "风格控制"),
    "why_style": (
        "Holds length, headers, lists and bold text constant: what is left is not owed to the looks of an answer.",
        "固定长度、标题、列表与粗体的影响：其余部分与回答的外观无关。",
    ),
    "filter_since": ("From", "起始日"),
    "filter_until": ("Until", "截止日"),
    "filter_min_votes": ("At least votes", "最少票数"),
    "filter_method": ("Method", "方法"),
    "filter_apply": ("Apply", "应用"),
    "filter_reset": ("Show everything", "显示全部"),
    "filter_note": ("{votes} of {all} votes", "{all} 票中的 {votes} 票"),
    "filter_note_one": ("{votes} of {all} vote", "{all} 票中的 {votes} 票"),
    "method_not_here": ("{method} (not with this choice)", "{method}（不适用于当前选择）"),
    "why_method_not_here": ("{why}. Take that away to choose {method}.", "{why} 取消后即可选择 {method}。"),
    "none_chosen_title": ("No votes fit this choice", "没有符合条件的投票"),
    "none_chosen_text": ("Choose other votes, or show everything.", "请换一种选择，或显示全部。"),
    "col_ties": ("Ties", "平局"),
    "col_both_bad": ("Both bad", "都不好"),
    "col_sure_rank": ("Sure rank", "联合名次"),
    "why_ties": ("Votes that found both equally good.", "认为两者一样好的票数。"),
    "why_both_bad": (
        "Votes that found both bad: half a win each, counted apart from ties.",
        "认为都不好的票数：各计半胜，与平局分开统计。",
    ),
    "why_sure_rank": (
        "The same from intervals that hold for all models at once, 95 times in 100: for "
        "statements about the whole order.",
        "由对所有模型同时成立（100 次中 95 次）的区间得出：适用于关于整体排序的结论。",
    ),
    "interval_more": (
        "95%: {lower} to {upper}. All at once: {sure_lower} to {sure_upper}. "
        "At every look: {always_lower} to {always_upper}.",
        "95%：{lower} 至 {upper}。同时成立：{sure_lower} 至 {sure_upper}。"
        "随时查看均成立：{always_lower} 至 {always_upper}。",
    ),
    "provisional": ("provisional", "暂定"),
    "why_provisional": (
        "Fewer than {votes} votes, or too few opponents: a first impression.",
        "不足 {votes} 票或对手太少：仅为初步印象。",
    ),
    "retired_mark": ("retired", "已退役"),
    "sure_heading": ("How sure is the first place?", "第一名有多确定？"),
    "sure_early": (
        "It is far too early to say. That takes {few} votes or more on each model; "
        "of the two that lead, {first} has {first_votes} and {second} {second_votes}.",
        "现在下结论还太早：每个模型至少需要 {few} 票；"
        "领先的两个中，{first} 有 {first_votes} 票，{second} 有 {second_votes} 票。",
    ),
    "sure_apart": ("{first} and {second} are apart: their interval excludes a tie.", "{first} 与 {second} 已可区分。"),
    "sure_needed": (
        "{first} leads {second} by {gap} points. About {votes} more votes would part them, "
        "or {direct} between these two alone.",
        "{first} 领先 {second} {gap} 分。约需再有 {votes} 票才能区分，若只比这两个则需 {direct} 票。",
    ),
    "sure_needed_one": (
        "{first} leads {second} by {gap} points. About {votes} more vote would part them, "
        "or {direct} between these two alone.",
        "{first} 领先 {second} {gap} 分。约需再有 {votes} 票才能区分，若只比这两个则需 {direct} 票。",
    ),
    "sure_level": ("{first} and {second} are level.", "{first} 与 {second} 不分上下。"),
    "sure_fragile": (
        "Taking away {votes} votes ({share}) would put {successor} first.",
        "去掉 {votes} 票（{share}）就会让 {successor} 成为第一。",
    ),
    "sure_fragile_one": (
        "Taking away {votes} vote ({share}) would put {successor} first.",
        "去掉 {votes} 票（{share}）就会让 {successor} 成为第一。",
    ),
    "bias_heading": ("Position and length", "位置与长度"),
    "bias_text": (
        "What a vote owes to the side, or to length, with the models held constant. "
        "In rating points, with 95% intervals.",
        "在模型固定时，投票有多少取决于左右位置或长度。单位为评分点，附 95% 区间。",
    ),
    "effect_position": ("Being on side A", "位于 A 侧"),
    "effect_length": ("One step longer", "更长一级"),
    "effect_headers": ("One step more headers", "标题多一级"),
    "effect_lists": ("One step more lists", "列表多一级"),
    "effect_bold": ("One step more bold", "粗体多一级"),
    "effect_value": ("{points} points ({lower} to {upper})", "{points} 分（{lower} 至 {upper}）"),
    "effect_early": ("too few votes to tell", "票数太少，无法判断"),
    "effect_untold": ("cannot be told apart from the others", "无法与其他因素区分"),
    "wins_heading": ("Win rates, row against column", "胜率（行对列）"),
    "wins_text": ("Wins plus half of ties, of the votes on that pair.", "该组合的胜场加一半平局，占其票数之比。"),
    "meetings_heading": ("Votes by pair", "各组合票数"),
    "meetings_text": ("How often each pair was voted on.", "每个组合被投票的次数。"),
    "map_shortened": ("The first {shown} of {models} models.", "前 {shown} 个模型，共 {models} 个。"),
    "map_cell": ("{row} against {column}: {share} of {votes} votes", "{row} 对 {column}：{votes} 票中的 {share}"),
    "map_cell_one": ("{row} against {column}: {share} of {votes} vote", "{row} 对 {column}：{votes} 票中的 {share}"),
    "history_heading": ("Rating over time", "评分走势"),
    "history_text": ("Bradley–Terry of all votes up to each day.", "截至各日全部投票的 Bradley–Terry 评分。"),
    "download_heading": ("Take it with you", "下载"),
    "download_json": ("JSON", "JSON"),
    "download_csv": ("CSV", "CSV"),
    "download_md": ("Markdown", "Markdown"),
    "download_svg": ("Picture", "图片"),
    "permalink": ("Link to this view", "此视图的链接"),
    "recompute": ("Compute it again", "重新计算"),
    "selection_bad": ("This view does not exist: {why}", "没有这样的视图：{why}"),
}
