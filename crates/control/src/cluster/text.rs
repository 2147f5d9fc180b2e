//! Shortening of texts from other machines.

/// Returns the longest beginning of a text that takes at most `most_bytes` as JSON, followed by `…`
/// if the text was cut.
pub(crate) fn beginning(text: &str, most_bytes: usize) -> String {
    let mut left = most_bytes;
    let fits = text.char_indices().find(|(_, char)| {
        // JSON escapes some characters with two or six bytes.
        let bytes = match char {
            '"' | '\\' => 2,
            char if char.is_control() => 6,
            char => char.len_utf8(),
        };
        let is_over = bytes > left;
        left = left.saturating_sub(bytes);
        is_over
    });
    match fits {
        None => text.to_owned(),
        Some(_) if most_bytes == 0 => String::new(),
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}
