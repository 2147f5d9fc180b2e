//! What an import leaves out or changes.

use godwit_types::ImportFinding;

use crate::shown::shown;

/// Findings of a definition, in its order.
#[derive(Debug, Default)]
pub(crate) struct Findings(pub(crate) Vec<ImportFinding>);

/// Most findings: more tell nobody anything.
const MOST_FINDINGS: usize = 256;

impl Findings {
    /// Adds what is left out or changes.
    pub(crate) fn note(&mut self, what: impl AsRef<str>, why: impl AsRef<str>) {
        self.add(what.as_ref(), why.as_ref(), false);
    }

    /// Adds what makes an import impossible.
    pub(crate) fn refuse(&mut self, what: impl AsRef<str>, why: impl AsRef<str>) {
        self.add(what.as_ref(), why.as_ref(), true);
    }

    fn add(&mut self, what: &str, why: &str, refuses: bool) {
        // One that refuses is never lost.
        if self.0.len() < MOST_FINDINGS || refuses && self.0.iter().all(|known| !known.refuses) {
            self.0.push(ImportFinding { what: shown(what), why: shown(why), refuses });
        }
    }
}
