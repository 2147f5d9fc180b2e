//! What streams have learnt of the wire and of the codecs. A stream begins with what others to the same host have learnt, also those of
//! earlier migrations: a small guest has left before its own streams could know what pays.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Chooser, CodecFigures};

/// What has been learnt of one host's wire by all streams to it. They share it, and each overwrites it with what it has seen last.
#[derive(Debug, Default)]
pub struct Experience(Mutex<Learnt>);

#[derive(Clone, Copy, Debug, Default)]
struct Learnt {
    /// Wire bytes a second of one stream.
    wire_bytes_per_s: Option<f64>,
    codecs: [Option<CodecFigures>; 2],
}

impl Experience {
    fn learnt(&self) -> MutexGuard<'_, Learnt> {
        // Figures, replaced one by one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wire bytes a second, as some stream saw it last.
    pub(crate) fn wire_bytes_per_s(&self) -> Option<f64> {
        self.learnt().wire_bytes_per_s
    }
}

impl Chooser {
    /// Begins with what others have learnt. That a codec brought less than its figures say was due to what the CPUs did then.
    #[must_use]
    pub fn experienced(self, experience: &Experience) -> Chooser {
        let Learnt { wire_bytes_per_s, codecs } = *experience.learnt();
        let codecs = codecs.map(|codec| Some(CodecFigures { trust: 1.0, ..codec? }));
        Chooser { wire_bytes_per_s, codecs, ..self }
    }

    /// Passes on what it knows; what it does not stays as others saw it.
    pub fn pass_on(&self, experience: &Experience) {
        let mut learnt = experience.learnt();
        learnt.wire_bytes_per_s = self.wire_bytes_per_s.or(learnt.wire_bytes_per_s);
        for (learnt, own) in learnt.codecs.iter_mut().zip(self.codecs) {
            *learnt = own.or(*learnt);
        }
    }
}
