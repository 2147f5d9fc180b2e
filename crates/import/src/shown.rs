//! Text of a definition in messages.

/// Longest text of a definition in a finding, in characters.
const MOST_SHOWN: usize = 200;

/// Returns text for a message: without control characters, and not too long.
pub(crate) fn shown(text: &str) -> String {
    let mut shown: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MOST_SHOWN).collect();
    if text.chars().nth(MOST_SHOWN).is_some() {
        shown.push('…');
    }
    shown
}
