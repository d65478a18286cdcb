"""Model arguments as ComfyUI names them, where they are the same in every family: what their dimensions
are."""

#: Argument -> its dimensions. "batch" is the latent's or 1, "width" the family's (Conditioning.widths), "..."
#: the sides of the (first) latent and "... of audio" of the last one; any other name is one size in all
#: arguments of a prompt, a number that size.
DIMENSIONS = {
    "c_crossattn": ("batch", "tokens", "width"),
    "attention_mask": ("batch", "tokens"),
    "text_embedding_mask": ("batch", "tokens"),
    "encoder_hidden_states_t5": ("batch", "tokens of T5", "width"),
    "text_embedding_mask_t5": ("batch", "tokens of T5"),
    "encoder_hidden_states_llama3": ("batch", "layers", "tokens of Llama", "width"),
    "txt_byt5": ("batch", "tokens of byT5", "width"),
    "clip_fea": ("batch", "image features", "width"),
    "y": ("batch", "width"),
    "c_concat": ("batch", "channels", "..."),
    "time_dim_replace": ("batch", "known channels", "known frames", "known height", "known width"),
    "denoise_mask": ("batch", "masked channels", "..."),
    "audio_denoise_mask": ("batch", "masked channels of audio", "... of audio"),
    "keyframe_idxs": ("batch", 3, "tokens of guides", 2),
    "generated_keyframes": ("batch", 3),
    "guide_weights": ("batch", "tokens of guides"),
    "text_tags": ("batch", "tokens"),
    "given_video": ("batch", "reference tokens of video", "width"),
    "given_audio": ("batch", "reference tokens of audio", "width"),
    "given_tags": ("batch", "reference tokens"),
    "given_positions": ("batch", "reference tokens", 3),
    "given_times": ("batch", 2),
    "image_meta_size": ("batch", 6),
    "c_size": ("batch", 2),
    "image_slots": ("batch", "places"),
    "c_ar": ("batch", 1),
    "vace_context": ("batch", "control videos", "control channels", "frames", "height", "width"),
    "vace_strength": ("batch", "control videos"),
}
#: Those of them that are floating-point: embeddings, and these others.
FLOATING = {name for name, dimensions in DIMENSIONS.items() if dimensions[-1] == "width"} | {
    "c_concat",
    "time_dim_replace",
    "vace_context",
    "vace_strength",
    "guide_weights",
}
#: Arguments that are one number, or one for each sample.
NUMBERS = (
    "guidance",
    "guiding_frame_index",
    "ofs",
    "frame_rate",
    "num_tokens",
    "ref_latents_method",
    "unprocessed_ltxav_embeds",
    "origin",
)
