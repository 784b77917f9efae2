"""Every sentence that a visitor or admin reads, in English and Chinese, in one table.

`words_for(language)` gives the table of one language; the scripts get theirs through the page (`for_scripts`). Nothing
here knows a model's name. Words in braces are filled in where the sentence is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import ArenaError
from app.model_rules import RULES
from app.views import leaderboard_words

LANGUAGES = {"en": "English", "zh": "中文"}

# key: (English, Chinese)
TABLE: dict[str, tuple[str, str]] = {
    "language": ("en", "zh"),
    # every page
    "brand": ("Paged Arena", "Paged Arena"),
    "skip": ("Skip to the content", "跳到正文"),
    "nav": ("Main", "主导航"),
    "nav_arena": ("Arena", "对战"),
    "nav_leaderboard": ("Leaderboard", "排行榜"),
    "nav_memory": ("Memory", "内存"),
    "nav_admin": ("Admin", "管理"),
    "other_language": ("中文", "English"),
    "other_language_label": ("切换到中文", "Switch to English"),
    "theme_light": ("Switch to the light look", "切换到浅色外观"),
    "theme_dark": ("Switch to the dark look", "切换到深色外观"),
    "no_script": ("Paged Arena needs JavaScript.", "Paged Arena 需要启用 JavaScript。"),
    "lost_title": ("Not found – Paged Arena", "未找到 – Paged Arena"),
    "lost_description": ("There is nothing at this address.", "此地址没有内容。"),
    "lost_heading": ("Nothing here", "这里什么也没有"),
    "lost_text": ("There is no page at this address.", "此地址没有页面。"),
    "lost_link": ("To the arena", "前往对战"),
    # arena
    "arena_title": ("Paged Arena – compare two hidden models", "Paged Arena – 匿名对比两个模型"),
    "arena_description": (
        "Ask one question, read two hidden models side by side, vote, and see who answered.",
        "提一个问题，并排阅读两个匿名模型的回答，投票，然后揭晓它们是谁。",
    ),
    "hero_title": ("Two answers.| No names.| You decide.", "两个回答，|没有名字，|由你评判。"),
    "hero_text": (
        "Ask anything. Two hidden models answer side by side. Vote for the better one, and then see who they were.",
        "随便问。两个匿名模型并排作答，请为更好的那个投票，之后才会揭晓它们是谁。",
    ),
    "examples": ("Or start with one of these", "也可以从这些问题开始"),
    "example_1": ("Explain to a ten-year-old why the sky is blue.", "用十岁孩子能听懂的话解释天空为什么是蓝色的。"),
    "example_2": (
        "Write a Python function that checks whether a word is a palindrome.",
        "写一个 Python 函数，判断一个单词是不是回文。",
    ),
    "example_3": ("Suggest three dinners from eggs, rice and spinach.", "用鸡蛋、米饭和菠菜推荐三道晚餐。"),
    "example_4": (
        "Write a polite message to reschedule a dentist appointment.",
        "写一条礼貌的信息，请求改约牙医的时间。",
    ),
    "notice_title": ("Before your first question", "提第一个问题之前"),
    "notice_text": (
        "Your questions, both answers and your vote are stored, with a random cookie that recognises this browser. "
        "They may be published as open data. Please write nothing personal or confidential. "
        "Answers come from small models and can be wrong.",
        "你的问题、两个回答和投票会被保存，并用一个随机 Cookie 识别此浏览器；它们可能作为开放数据公开。"
        "请不要填写个人或机密信息。回答来自小模型，可能有误。",
    ),
    "notice_accept": ("Accept and start", "同意并开始"),
    "notice_pending": ("Accept to send your question.", "同意后即可发送你的问题。"),
    "prompt_label": ("Your question", "你的问题"),
    "prompt_first": ("Ask both models anything…", "向两个模型提问…"),
    "prompt_follow": ("Ask a follow-up, or vote…", "继续追问，或投票…"),
    "prompt_new": ("Ask something new…", "提个新问题…"),
    "prompt_waiting": ("Both are answering…", "两个模型正在作答…"),
    "prompt_keys": ("Enter sends · Shift + Enter for a new line", "回车发送 · Shift + 回车换行"),
    "send": ("Send", "发送"),
    "stop": ("Stop", "停止"),
    "tokens": ("{tokens} of {limit} tokens", "{tokens} / {limit} 个词元"),
    "tokens_over": (
        "Too long: your message has {tokens} tokens and there is room for {limit}. Shorten it to send.",
        "太长了：你的消息有 {tokens} 个词元，这里最多 {limit} 个。请缩短后再发送。",
    ),
    "too_many_lines": (
        "A text of {lines} lines or more cannot be pasted here. Please ask with a part of it.",
        "这里无法粘贴 {lines} 行或更多的文本，请只用其中一部分提问。",
    ),
    "model_a": ("Model A", "模型 A"),
    "model_b": ("Model B", "模型 B"),
    "you": ("You", "你"),
    "side_streaming": ("Answering", "作答中"),
    "side_done": ("Done", "已完成"),
    "side_stopped": ("Stopped", "已停止"),
    "side_interrupted": ("Interrupted", "已中断"),
    "side_failed": ("Not finished", "未完成"),
    "side_failed_message": ("This answer could not be finished.", "这个回答未能完成。"),
    "side_stopped_message": ("You stopped this answer.", "你停止了这个回答。"),
    "side_interrupted_message": ("This answer was interrupted.", "这个回答被中断了。"),
    "side_empty": ("No answer came before it ended.", "结束前没有产生任何回答。"),
    "retry": ("Try again", "重试"),
    "copy": ("Copy", "复制"),
    "copied": ("Copied", "已复制"),
    "copy_code": ("Copy the code", "复制代码"),
    "to_end": ("Jump to the newest words", "跳到最新内容"),
    "side_tabs": ("Which answer to show", "显示哪个回答"),
    "more": ("Show all", "展开"),
    "less": ("Show less", "收起"),
    "vote_question": ("Which answer is better?", "哪个回答更好？"),
    "vote_a": ("A is better", "A 更好"),
    "vote_b": ("B is better", "B 更好"),
    "vote_tie": ("Tie", "平局"),
    "vote_bad": ("Both are bad", "都不好"),
    "vote_keys": ("Keys 1 to 4 vote (Alt + 1 to 4 while typing)", "按 1–4 投票（输入时按 Alt + 1–4）"),
    "vote_failed": ("Your vote was not saved. Please try again.", "投票没有保存成功，请再试一次。"),
    "regenerate": ("Regenerate", "重新生成"),
    "new_battle": ("New battle", "新对战"),
    "rematch": ("Same question, new pair", "同一问题，换一对模型"),
    "to_leaderboard": ("See the leaderboard", "查看排行榜"),
    "thanks": ("Thank you. Your vote is counted.", "谢谢，你的投票已计入。"),
    "thanks_not_counted": (
        "Thank you. Your vote is kept, but it will not be rated.",
        "谢谢。你的投票已保存，但不计入评分。",
    ),
    # why a vote is not rated, by reason (db/decisions.py)
    "reason_identity": (
        "A name or maker of one of the two models stands in the conversation, so it was not blind.",
        "对话中出现了其中一个模型或其机构的名称，因此不是匿名对比。",
    ),
    "reason_quarantine": (
        "Votes from this browser are being looked at by the admin.",
        "来自此浏览器的投票正由管理员核查。",
    ),
    "reason_frequent_prompt": (
        "This question is asked so often that only a sample of its votes is rated.",
        "这个问题被问得太频繁，只有抽样的投票会计入评分。",
    ),
    "reason_imported": ("The file that it came from does not count it.", "其来源文件未将它计入。"),
    "reason_recount": ("It counts again.", "已重新计入。"),
    "voted_a": ("You preferred {a} over {b}.", "你认为 {a} 比 {b} 更好。"),
    "voted_b": ("You preferred {b} over {a}.", "你认为 {b} 比 {a} 更好。"),
    "voted_tie": ("You called it a tie between {a} and {b}.", "你判 {a} 与 {b} 平局。"),
    "voted_both_bad": ("You found both {a} and {b} bad.", "你认为 {a} 和 {b} 都不好。"),
    "was": ("was", "是"),
    "your_choice": ("Your choice", "你的选择"),
    "battle_interrupted": (
        "The answers were interrupted. Regenerate to have this question answered again by the same two models.",
        "回答被中断了。点“重新生成”，由同样的两个模型再答一次。",
    ),
    "battle_stopped": (
        "You stopped the answers. Regenerate to have them complete, then vote.",
        "你停止了回答。重新生成完整回答后即可投票。",
    ),
    "battle_failed": (
        "The answer of {side} is missing, so there is nothing to compare yet. Try that side again.",
        "{side} 的回答缺失，暂时无法比较。请让那一侧重试。",
    ),
    "battle_failed_both": (
        "Neither answer could be finished. Regenerate to have this question answered again by the same two models.",
        "两个回答都未能完成。点“重新生成”，由同样的两个模型再答一次。",
    ),
    "battle_void": (
        "This battle cannot go on: one of its models has left. Start a new one.",
        "这场对战无法继续：其中一个模型已退出。请开始新的对战。",
    ),
    "connection_lost": ("Connection lost. Trying again…", "连接已断开，正在重试…"),
    "offline": ("No connection. Please try again.", "没有网络连接，请重试。"),
    "send_failed": ("Your question was not sent. Please try again.", "问题没有发送成功，请再试一次。"),
    "went_wrong": ("That did not work. Please try again.", "操作没有成功，请再试一次。"),
    # what the server refuses, by its code (app/errors.py); in English its own sentence is shown where it has one
    "error_internal": ("Something went wrong on our side.", "我们这边出错了，请稍后再试。"),
    "error_not_signed_in": ("That password is not right.", "密码不正确，或尚未登录。"),
    "error_foreign_origin": ("This was sent by a page of another site.", "该请求来自其他网站的页面，已被拒绝。"),
    "error_notice_required": ("Please accept the notice first.", "请先同意使用说明。"),
    "error_not_found": ("There is nothing here by that name.", "找不到所请求的内容。"),
    "error_conflict": ("This does not fit what is there now.", "这与当前的状态冲突。"),
    "error_already_voted": ("This battle has its vote already.", "这场对战已经投过票了。"),
    "error_not_votable": ("You can vote once both sides have answered.", "两边都回答完之后才能投票。"),
    "error_wrong_state": (
        "This does not fit what the battle is doing now.",
        "对战的当前状态不允许这样做，请看页面上最新的内容。",
    ),
    "error_name_taken": ("There is a model of that name already.", "已有同名的模型。"),
    "error_bad_input": ("This cannot be read.", "无法识别所提交的内容，请修改后再试。"),
    "error_blank_prompt": ("Please type a question first.", "请先输入问题。"),
    "error_prompt_too_long": (
        "Your message is {tokens} tokens long; there is room for {limit} here.",
        "你的消息有 {tokens} 个词元，这里最多 {limit} 个。",
    ),
    "error_body_too_large": ("This message is too large.", "这条消息太大了，请缩短后再试。"),
    "error_too_many": (
        "A limit of this arena is reached. Please come back a little later.",
        "已达到本站允许的次数。请稍后再来，或先为当前的对战投票。",
    ),
    "error_not_ready": (
        "The models are not ready at this moment; please try once more in a few seconds.",
        "模型此刻尚未就绪，请过几秒再试。",
    ),
    "no_database": (
        "The database does not answer at the moment. Please load this page again in a few seconds.",
        "数据库暂时没有响应，请过几秒再刷新页面。",
    ),
    "error_storage": ("Nothing could be saved. Please try again.", "暂时无法保存，什么也没有记录，请再试一次。"),
    "not_enough_title": ("Two models are needed for a battle", "对战需要两个模型"),
    "not_enough_text": (
        "Models ready now: {n}. They may still be loading: this page goes on by itself as soon as two are ready. "
        "Otherwise an admin can add or enable one under “Admin”, or with “arena models add”.",
        "目前就绪的模型数：{n}。它们可能仍在加载，两个就绪后本页会自动继续。"
        "否则请管理员在“管理”页或用 arena models add 添加或启用模型。",
    ),
    # leaderboard
    "leaderboard_title": ("Leaderboard – Paged Arena", "排行榜 – Paged Arena"),
    "leaderboard_description": (
        "How the models compare: ratings with 95% intervals from blind votes.",
        "模型排名：根据匿名投票得出的评分及 95% 区间。",
    ),
    "leaderboard_heading": ("Leaderboard", "排行榜"),
    "leaderboard_text": (
        "Ratings from blind votes. The bar is the 95% interval: where two bars overlap, the order is not certain yet.",
        "评分来自匿名投票。横条为 95% 区间：两条重叠时，先后尚不确定。",
    ),
    "leaderboard_caption": ("Models by rating", "按评分排列的模型"),
    "col_rank": ("Rank", "名次"),
    "col_model": ("Model", "模型"),
    "col_rating": ("Rating", "评分"),
    "col_interval": ("95% interval", "95% 区间"),
    "col_votes": ("Votes", "票数"),
    "col_wins": ("Wins", "胜场"),
    "col_elo": ("Elo", "Elo"),
    "why_rank": (
        "Best and worst place that the intervals allow: 1 + the models surely above, up to 1 + those not surely below.",
        "区间所允许的最好与最差名次：1 + 确定更强的模型数，至 1 + 不能确定更弱的模型数。",
    ),
    "why_rating": (
        "Bradley–Terry, by maximum likelihood. 1,000 is the average; 100 points more win 64% of the votes.",
        "Bradley–Terry 极大似然评分。1000 为平均；高 100 分约赢得 64% 的投票。",
    ),
    "why_votes": ("Counted votes on battles with this model.", "该模型参与的对战中已计入的票数。"),
    "why_wins": ("Votes that preferred this model to the other one.", "认为该模型更好的票数。"),
    "why_elo": (
        "Online Elo (K = 4) in the order of the votes, for comparison. It depends on that order; the rating does not.",
        "按投票先后计算的 Elo（K = 4），仅供对照。它与先后有关，评分则无关。",
    ),
    "votes_counted": ("{votes} votes", "{votes} 票"),
    "votes_counted_one": ("{votes} vote", "{votes} 票"),
    "models_ranked": ("{models} models", "{models} 个模型"),
    "models_ranked_one": ("{models} model", "{models} 个模型"),
    "updated_live": ("Updated with each vote", "随每次投票更新"),
    "board_empty_title": ("No votes yet", "还没有投票"),
    "board_empty_text": ("The first battle decides who leads.", "第一场对战将决定谁领先。"),
    "board_empty_link": ("Start a battle", "开始对战"),
    "board_failed": (
        "The leaderboard cannot be read just now. It will be tried again.",
        "暂时无法读取排行榜，稍后会自动重试。",
    ),
    "note_prior": (
        "Some models have only won or only lost, so a weak prior (weight {prior}) keeps their ratings finite.",
        "有的模型只赢或只输，因此加入弱先验（权重 {prior}）使评分保持有限。",
    ),
    "note_islands": (
        "No votes join these groups, so ratings cannot be compared across them: {islands}.",
        "以下各组之间没有投票相连，评分不可跨组比较：{islands}。",
    ),
    "note_few": (
        "Models with fewer than {votes} votes: {few} of {models}. Their intervals are rough.",
        "{models} 个模型中有 {few} 个不足 {votes} 票，其区间较粗略。",
    ),
    "interval_text": ("{lower} to {upper}", "{lower} 至 {upper}"),
    # memory
    "memory_title": ("Memory, live – Paged Arena", "实时内存 – Paged Arena"),
    "memory_description": (
        "The memory of the engine, page by page, while battles run.",
        "对战进行时，逐页实时查看引擎的内存。",
    ),
    "memory_heading": ("Memory, live", "实时内存"),
    "memory_text": (
        "Everything the models keep in mind lies in one pool of small pages. Each square below is a page of it, now.",
        "模型记住的一切都放在同一个由小页组成的池子里。下面每个方格就是其中一页此刻的状态。",
    ),
    "memory_connecting": ("Connecting to the engine…", "正在连接引擎…"),
    "memory_live": ("Live", "实时"),
    "memory_idle": (
        "Nobody is asking just now. What is kept are the system prompts, ready for the next question.",
        "此刻没有提问。保留着的是系统提示，随时用于下一个问题。",
    ),
    "memory_empty": (
        "Nobody is asking just now, and the pool is empty. Start a battle and watch it fill.",
        "此刻没有提问，池子是空的。开始一场对战，看它如何被填充。",
    ),
    "memory_estimated": (
        "A battle waits for its vote. Until then its pages are drawn from the text already shown, at the mean size of "
        "all models (≈), so that this page cannot tell which two are answering.",
        "有一场对战正在等待投票。在此之前，其页数按已显示的文字、以所有模型的平均大小绘制（≈），"
        "因此本页不会泄露是哪两个模型在作答。",
    ),
    "memory_exact": (
        "Live, exact, with names: you are signed in as the admin.",
        "实时精确数据（含模型名）：你已以管理员身份登录。",
    ),
    "memory_away": (
        "The engine does not answer just now. This page goes on by itself as soon as it is back.",
        "引擎暂时没有响应；恢复后本页会自动继续。",
    ),
    "memory_waste": ("Reserved, but empty", "已占用却空着"),
    "memory_more": ("More battles that fit", "还能容纳的对战"),
    "memory_fits_none": ("0, one alone is more than the pool", "0，一场就超出整个内存池"),
    "memory_served": ("Not computed again", "无需重算"),
    "memory_served_unit": ("tokens served from shared pages", "个词元取自共享页"),
    "memory_running": ("Answers under way", "进行中的回答"),
    "memory_waiting": ("{n} waiting", "{n} 个等待中"),
    "memory_instead_of": ("older way:", "旧方式："),
    "memory_map": ("The pool", "内存池"),
    "memory_scale": ("{total} pages of {size} · {memory}", "共 {total} 页，每页 {size} · {memory}"),
    "memory_scale_stride": (
        "{total} pages of {size} · {memory} · every {n}th is drawn",
        "共 {total} 页，每页 {size} · {memory} · 每 {n} 页画一页",
    ),
    "memory_canvas": (
        "Map of all pages of the pool; the list after it has the same numbers. Arrow keys go from page to page.",
        "内存池全部页的图；其后的列表给出相同的数字。用方向键逐页移动。",
    ),
    "memory_touch": ("Point at a page to see what it is for.", "指向某一页即可查看其用途。"),
    "memory_page": ("Page {page}: {state}", "第 {page} 页：{state}"),
    "page_free": ("Free", "空闲"),
    "page_cached": ("Kept", "保留"),
    "page_used": ("In use", "使用中"),
    "page_shared": ("Shared", "共享"),
    "page_pinned": ("System prompt", "系统提示"),
    "page_pinned_in_use": ("System prompt, being read", "系统提示（被读取）"),
    "says_free": ("free", "空闲"),
    "says_cached": ("kept after its answer ended, until the space is needed", "回答结束后保留，直到需要空间"),
    "says_used": ("in use by one answer", "由一个回答使用"),
    "says_shared": ("shared by several answers", "由多个回答共享"),
    "says_pinned": ("part of a system prompt, computed once and kept", "系统提示的一部分，只算一次并保留"),
    "says_pinned_in_use": ("part of a system prompt that answers are reading now", "系统提示的一部分，正被回答读取"),
    "memory_ways": ("The same answers, held three ways", "同样的回答，三种存法"),
    "memory_ways_text": (
        "How much of the pool the answers under way take here, and what they would take where each one reserves its "
        "memory in advance, in one piece.",
        "进行中的回答在这里占用多少内存，以及若各自预先整块预留，会占用多少。",
    ),
    "way_paged": ("Page by page (here)", "按页分配（本站）"),
    "way_pow2": ("Doubling reservations", "按倍增预留"),
    "way_max": ("The longest text, reserved", "按最长文本预留"),
    "way_says": (
        "{pages} pages, {percent}% of the pool · {waste}% of them empty",
        "{pages} 页，占内存池 {percent}% · 其中 {waste}% 空着",
    ),
    "way_nothing": ("nothing to hold just now", "此刻没有需要保存的内容"),
    "memory_too_much": ("more than there is", "超出容量"),
    "memory_with_token": ("holds a token", "存有词元"),
    "memory_without_token": ("reserved for nothing", "空占"),
    "memory_models": ("By model", "按模型"),
    "memory_tokens": ("Tokens", "词元"),
    "memory_told": ("In plain words", "简单来说"),
    "ask_page": ("What is a page?", "什么是页？"),
    "told_page": (
        "To write the next word a model looks back at all words so far, and keeps notes on each of them. A page is a "
        "small sheet of such notes. An answer takes a new one when the last is full, and gives them back at its end.",
        "模型写下一个词时要回看之前的所有词，并为每个词留有笔记。页就是一小张笔记纸："
        "写满一张才取下一张，回答结束后全部归还。",
    ),
    "ask_shared": ("Why are some shared?", "为什么有些是共享的？"),
    "told_shared": (
        "Every conversation with a model begins with the same instructions, its system prompt. Their notes are made "
        "once and read by everyone. The first words come sooner, and the memory is there for others.",
        "与同一模型的每次对话都以相同的指令（系统提示）开头。这部分笔记只做一次，供所有对话共用，"
        "既更快出首字，也省下内存。",
    ),
    "ask_older": ("What would the older way take?", "旧方式会占用多少？"),
    "told_older": (
        "Older engines set aside one unbroken stretch for each answer, as long as the longest text there could be. "
        "Most of it stays empty, and the next visitor has to wait although there is room.",
        "旧的引擎为每个回答预留一整段连续内存，长度按可能的最长文本计。其中大部分一直空着，"
        "明明有空间，下一位访客却要等待。",
    ),
    "memory_numbers": ("The same as numbers", "数字形式"),
    "memory_way": ("Way", "方式"),
    "memory_pages": ("Pages", "页数"),
    "memory_fine": (
        "Empty is the share of allocated slots without a token. A battle is two answers of the mean length so far. "
        "The reservations follow the PagedAttention paper (Kwon et al., 2023, section 6.1): the longest text the model "
        "allows; or the prompt and the power of two that holds the answer so far.",
        "“空着”指已分配而没有词元的槽位占比。一场对战按迄今平均长度的两个回答计。"
        "预留规则取自 PagedAttention 论文（Kwon 等，2023，6.1 节）：模型允许的最长文本；"
        "或提示加上能容纳当前回答的 2 的幂。",
    ),
    # admin
    "login_title": ("Sign in – Paged Arena", "登录 – Paged Arena"),
    "login_description": ("Sign in as the admin of this arena.", "以本站管理员身份登录。"),
    "login_heading": ("Admin", "管理"),
    "login_text": (
        "The password is ARENA_ADMIN_PASSWORD of the server, or the one it printed when it first started.",
        "密码为服务器的 ARENA_ADMIN_PASSWORD，或首次启动时打印的那个。",
    ),
    "login_password": ("Password", "密码"),
    "login_send": ("Sign in", "登录"),
    "logout": ("Sign out", "退出登录"),
    "admin_title": ("Admin – Paged Arena", "管理 – Paged Arena"),
    "admin_description": ("The models of this arena.", "本站的模型。"),
    "admin_heading": ("Models", "模型"),
    "admin_text": (
        "Enabled models that are ready take part in battles at once. A change needs no restart.",
        "已启用且就绪的模型会立即参与对战，更改无需重启。",
    ),
    "pool": (
        "KV pool: {used}% in use, {cached}% cached of {total} pages · {served} tokens served from cache",
        "KV 池：共 {total} 页，使用中 {used}%，缓存 {cached}% · 缓存命中 {served} 个词元",
    ),
    "pool_unknown": ("KV pool: the engine does not answer just now.", "KV 池：引擎暂时没有响应。"),
    "models_empty_title": ("No models yet", "还没有模型"),
    "models_empty_text": ("Register two or more below to have battles.", "请在下方注册两个或更多模型，即可开始对战。"),
    "col_status": ("Status", "状态"),
    "col_actions": ("Actions", "操作"),
    "status_waiting": ("Waiting", "等待中"),
    "status_loading": ("Loading", "加载中"),
    "status_ready": ("Ready", "就绪"),
    "status_failed": ("Failed", "失败"),
    "status_disabled": ("Disabled", "已停用"),
    "status_retired": ("Retired", "已退役"),
    "loading_label": ("{name} loading", "{name} 加载进度"),
    "loaded_bytes": ("{done} of {total} MB", "{done} / {total} MB"),
    "loaded_tensors": ("{done} of {total} tensors", "{done} / {total} 个张量"),
    "system_tokens": ("system prompt {tokens} tokens", "系统提示 {tokens} 个词元"),
    "system_some": ("with a system prompt", "带系统提示"),
    "chat_format": ("chat template {name}", "对话模板 {name}"),
    "enable": ("Enable", "启用"),
    "disable": ("Disable", "停用"),
    "retire": ("Retire", "退役"),
    "enable_label": ("Enable {name}", "启用 {name}"),
    "disable_label": ("Disable {name}", "停用 {name}"),
    "retire_label": ("Retire {name}", "让 {name} 退役"),
    "retry_label": ("Try {name} again", "重试 {name}"),
    "retire_sure": ("Retire for good?", "确定永久退役？"),
    "register_heading": ("Register a model", "注册模型"),
    "register_text": (
        "A checkpoint under a name. The same checkpoint with another system prompt or temperature is another model "
        "and shares its weights.",
        "为检查点命名即成模型。同一检查点配不同的系统提示或温度就是另一个模型，并共享权重。",
    ),
    "register": ("Register", "注册"),
    "registering": ("Registering…", "正在注册…"),
    "register_wrong": ("Nothing was registered. Mend what is marked above.", "没有注册。请修改上面标出的内容。"),
    "registered_ready": (
        "{name} is registered and ready: it takes part in battles from now on.",
        "{name} 已注册并就绪，即刻参与对战。",
    ),
    "registered_loading": (
        "{name} is registered and loads. The table above shows how far it is and, should it fail, why.",
        "{name} 已注册，正在加载。上表显示进度；如果失败，也会显示原因。",
    ),
    "registered_waiting": (
        "{name} is registered and loads as soon as it can. Now it waits: {reason}",
        "{name} 已注册，一有可能就会加载。目前在等待：{reason}",
    ),
    "registered_failed": (
        "{name} is registered but does not work: {reason}. Mend that and press “Try again” in the table above; "
        "if the source is wrong, retire it there and register it anew.",
        "{name} 已注册，但无法使用：{reason}。请先排除原因，再在上表中点“重试”；"
        "如果来源写错了，请在上表中让它退役，然后重新注册。",
    ),
    "sources_label": ("Kinds of source", "来源种类"),
    "source_pypi": ("one of the two checkpoints that come with the arena", "竞技场自带的两个检查点之一"),
    "source_path": ("a folder or a .gguf file on the engine's disk", "引擎所在磁盘上的文件夹或 .gguf 文件"),
    "source_hf": ("a repository on the Hugging Face Hub", "Hugging Face Hub 上的仓库"),
    "source_openai": ("a remote OpenAI-compatible endpoint", "远程 OpenAI 兼容接口"),
    "not_a_number": ("This must be a number.", "这里须填数字。"),
    "not_a_whole_number": ("This must be a whole number.", "这里须填整数。"),
    # what is wrong with a model's entry, by rule (app/model_rules.py)
    **{
        f"rule_{rule}": (RULES[rule], chinese)
        for rule, chinese in {
            "name_exists": "已有名为 {name} 的模型，请换一个名称。",
            "name_retired": "名为 {name} 的模型已退役，它的投票保留这个名称，请换一个。",
            "name_case": "已有名为 {name} 的模型，请换一个不只是大小写不同的名称。",
            "name": "名称须为 1 到 64 个字母、数字、空格或 . _ + -，并以字母或数字开头；{value} 不符合。",
            "system_prompt": "系统提示必须是文本。",
            "context_least": "上下文长度须为整数，至少 16 个词元。",
            "context_most": "上下文长度为 {asked} 个词元；{source} 最多允许 {allowed} 个。",
            "key_is_a_name": "这里填环境变量的名称，而不是密钥本身。",
            "key_named_as_setting": "以 ARENA_ 开头的名称属于竞技场的设置，请换一个名称。",
            "key_without_endpoint": "密钥变量只用于远程接口（openai:…）。",
            "template_of_endpoint": "远程接口自带对话模板。",
            "precision": "权重精度须为 {names}，留空则取引擎的精度，而不是 {value}。",
            "precision_of_endpoint": "远程接口的权重精度由其自身决定。",
            "adapter": "{value} 不是 LoRA 适配器的来源。来源的形式：{sources}",
            "kv_share_of_endpoint": "远程接口不占用本机的页池。",
            "kv_shares": "份额为 {share:g}，其他模型已占页池的 {taken:g}，最多还剩 {left:g}。",
            "adapter_of_endpoint": "适配器只能用于本地检查点，不能用于远程接口。",
            "endpoint": "{value} 不是 openai:https://host/v1#model 的形式（密钥请放在环境变量里）。",
            "source": "{value} 不是检查点的来源。来源的形式：{sources}",
            "path": "{path} 处没有文件或文件夹。",
            "sampling_table": "采样参数须为名称与值的表。",
            "sampling_name": "没有名为 {value} 的采样参数；可用的有 {names}。",
            "kind": "{field} 须为{kind}，而不是 {value}。",
            "at_least": "{field} 至少须为 {least}，而不是 {value}。",
            "from_to": "{field} 须在 {least} 到 {most} 之间，而不是 {value}。",
            "about": "{field} 须为文本，最多 {most} 个字符。",
            "fewest_over_most": "min_tokens 不得大于 max_tokens。",
            "no_json": "{field} 含有无法以 JSON 传给引擎的内容：超过 64 位的整数或半个字符。",
        }.items()
    },
    **{
        f"kind_{kind}": (kind, chinese)
        for kind, chinese in {
            "a whole number": "整数",
            "a number": "数字",
            "true or false": "true 或 false",
            "a list of texts": "文本列表",
            "a list of whole numbers": "整数列表",
        }.items()
    },
    "field_name": ("Name", "名称"),
    "help_name": ("What visitors see after their vote.", "访客投票后看到的名称。"),
    "field_source": ("Source", "来源"),
    "help_source": ("Where the checkpoint comes from; examples below.", "检查点的来源，示例见下。"),
    "field_system_prompt": ("System prompt", "系统提示"),
    "help_system_prompt": (
        "Optional. Kept in the pool and shared by all its conversations.",
        "可选。常驻 KV 池，由该模型的所有对话共享。",
    ),
    "field_temperature": ("Temperature", "温度"),
    "help_temperature": (
        "0 to 2; the shipped models have 0.2 to 0.3. Empty is 1: too hot for a small model.",
        "0 到 2，内置模型为 0.2 到 0.3。留空为 1，对小模型太高。",
    ),
    "field_top_p": ("Top p", "Top p"),
    "help_top_p": (
        "0 to 1; the shipped models have 0.9. Empty is 1: any token may come.",
        "0 到 1，内置模型为 0.9。留空为 1，即任何词元都可能出现。",
    ),
    "field_frequency_penalty": ("Frequency penalty", "频率惩罚"),
    "help_frequency_penalty": (
        "-2 to 2, against repetition; the shipped models have 0.3 to 0.6. Empty is 0.",
        "-2 到 2，用于防止重复；内置模型为 0.3 到 0.6。留空为 0。",
    ),
    "field_max_tokens": ("Longest answer", "最长回答"),
    "help_max_tokens": (
        "Tokens; the shipped models have 256 to 384. Empty is the arena's limit.",
        "词元数，内置模型为 256 到 384。留空取本站上限。",
    ),
    "field_chat_template": ("Chat template", "对话模板"),
    "help_chat_template": (
        "“plain-roles” for a base checkpoint that has none.",
        "没有自带模板的基础检查点请选 plain-roles。",
    ),
    "template_own": ("The checkpoint's own", "检查点自带"),
    "field_precision": ("Weights", "权重精度"),
    "help_precision": (
        "int8: half the memory, and sooner answers where few ask at once; a little less exact. "
        "compact: the same weights to the bit in three quarters of the memory, sooner answers where few ask at once, "
        "later ones where many do.",
        "int8：内存减半，同时提问的人少时回答更快，精确度略低。compact：权重逐位不变，内存为四分之三，"
        "同时提问的人少时更快，人多时略慢。",
    ),
    "precision_own": ("The engine's own", "引擎默认"),
    "field_adapter": ("Adapter", "适配器"),
    "help_adapter": (
        "A LoRA adapter over the source, as PEFT saves it; models over one source share its weights.",
        "源检查点之上的 LoRA 适配器（PEFT 格式）；同一来源的模型共用权重。",
    ),
    "precision_is": ("{name} weights", "{name} 权重"),
    "field_kv_share": ("Share of the pool", "页池份额"),
    "help_kv_share": (
        "0 to 1 that it may count on; what it does not use is lent. Empty is none.",
        "0 到 1，可保证使用的份额；未用部分借给其他模型。留空为无。",
    ),
    "kv_share_is": ("counts on {percent}% of the pool", "保证页池的 {percent}%"),
    "field_context_length": ("Context length", "上下文长度"),
    "help_context_length": ("Tokens; empty is what the checkpoint allows.", "词元数，留空取检查点上限。"),
    "votes_heading": ("Votes", "投票"),
    "votes_share": (
        "Votes: {votes}, of which {counted} rated; visitors in quarantine: {quarantined}.",
        "{votes} 票中有 {counted} 票计入评分；被隔离的访客：{quarantined}。",
    ),
    "votes_alarm": (
        "Of the newest votes only {newest}% are rated; before it was {before}%. Run “arena votes audit”.",
        "最新的投票中只有 {newest}% 计入评分，此前为 {before}%。请运行 arena votes audit。",
    ),
    "suspects_heading": ("Suspects", "可疑访客"),
    "suspects_text": (
        "Visitors who vote unlike all others, too fast, or from a crowded address. A quarantine keeps their votes from"
        " counting; it is in the log, and can be taken back.",
        "投票与众不同、过快，或来自拥挤地址的访客。隔离后其投票不计入评分；隔离会记入日志，也可撤销。",
    ),
    "suspects_look": ("Look for suspects", "查找可疑访客"),
    "suspects_found": (
        "Suspects: {suspects}, of {visitors} visitors with {votes} votes.",
        "可疑访客：{suspects}（共 {visitors} 位访客、{votes} 票）。",
    ),
    "col_why": ("Why", "原因"),
    "quarantine": ("Quarantine", "隔离"),
    "quarantine_label": ("Put visitor {visitor} into quarantine", "隔离访客 {visitor}"),
    "release": ("Release", "解除隔离"),
    "release_label": ("Take the quarantine of visitor {visitor} back", "解除访客 {visitor} 的隔离"),
    "col_vote": ("Vote", "投票"),
    "col_visitor": ("Visitor", "访客"),
    "col_time": ("Time (UTC)", "时间（UTC）"),
    "col_counted": ("Rated", "是否计入"),
    "counted_yes": ("Yes", "是"),
    "counted_no": ("No.", "否。"),
    "field_sampling_weight": ("Weight in the draw", "抽取权重"),
    "help_sampling_weight": (
        "0 to 100; empty is 1, twice as often is 2.",
        "0 到 100，留空为 1，2 表示抽到的机会加倍。",
    ),
    "field_organisation": ("Organisation", "机构"),
    "help_organisation": (
        "Who made it. Shown on the leaderboard; a battle in which it is named is not rated.",
        "模型的开发者。显示在排行榜上；对话中出现该名称时投票不计入评分。",
    ),
    "field_licence": ("Licence", "许可证"),
    "help_licence": ("Shown on the leaderboard.", "显示在排行榜上。"),
    "field_parameters": ("Parameters", "参数量"),
    "help_parameters": ("As people write it: 135M.", "按通常写法，如 135M。"),
    "field_endpoint_key_env": ("Key variable", "密钥变量"),
    "help_endpoint_key_env": (
        "For an endpoint: the name of the environment variable that holds its key.",
        "用于远程接口：保存其密钥的环境变量名。",
    ),
}

TABLE |= leaderboard_words.TABLE


def words_for(language: str) -> Mapping[str, str]:
    column = list(LANGUAGES).index(language)
    return {key: sentences[column] for key, sentences in TABLE.items()}


def said_in(words: Mapping[str, str], refusal: ArenaError) -> str:
    """A refusal in the language of these words: by its rule, else by its code; English has its own, fuller sentence."""
    if words["language"] == "en":
        return refusal.message
    if refusal.rule is None:
        return words[f"error_{refusal.code}"]
    values = dict(refusal.values)
    if "kind" in values:
        values["kind"] = words[f"kind_{values['kind']}"]
    return words[f"rule_{refusal.rule}"].format(**values)


def counted(words: Mapping[str, str], key: str, count: int, **values: str) -> str:
    """A sentence about so many votes, or whatever `key` calls them: in English one vote is no "1 votes"."""
    one = f"{key}_one"
    return words[one if count == 1 and one in words else key].format(**values)


def choose_language(asked: str | None, remembered: str | None, accept_language: str | None) -> str:
    """?lang= wins, then the cookie that it left, then the browser's list in its order of weight; else English."""
    for wish in (asked, remembered):
        if wish in LANGUAGES:
            return wish
    return next((code for code in accepted(accept_language or "") if code in LANGUAGES), "en")


def accepted(header: str) -> list[str]:
    """Primary language codes of an Accept-Language header, the most wanted first: "zh-CN,en;q=0.5" -> [zh, en]."""
    wishes = []
    for place, part in enumerate(header.split(",")[:20]):
        tag, _, parameters = part.strip().partition(";")
        try:
            weight = float(parameters.strip().removeprefix("q=") or 1)
        except ValueError:
            weight = 0.0
        if weight > 0:
            wishes.append((-weight, place, tag.split("-")[0].lower()))
    return [code for _, _, code in sorted(wishes)]
