//! What streams have learned about the wire and the codecs. A stream begins with what others to the
//! same host have learned, including those of earlier migrations: a small guest leaves before its
//! own streams could find out what pays.

use parking_lot::{Mutex, MutexGuard};

use godwit_wire::Codec;

use super::{Chooser, CodecFigures, Quotient, place};

/// Experience of all streams to one host. They share it, and each overwrites it with what it has
/// seen last.
#[derive(Debug, Default)]
pub struct Experience(Mutex<Learnt>);

#[derive(Clone, Copy, Debug, Default)]
struct Learnt {
    /// The wire's rate for one stream, bytes per second.
    wire_bytes_per_s: Option<f64>,
    codecs: [Option<CodecFigures>; 2],
    zstd_of_lz4: Quotient,
}

impl Experience {
    fn learnt(&self) -> MutexGuard<'_, Learnt> {
        // Figures, replaced one by one.
        self.0.lock()
    }

    /// Sets the wire's rate of one stream.
    #[cfg(test)]
    pub(crate) fn set_wire(&self, bytes_per_s: f64) {
        self.learnt().wire_bytes_per_s = Some(bytes_per_s);
    }

    /// Returns the wire's rate in bytes per second, as a stream saw it last.
    pub(crate) fn wire_bytes_per_s(&self) -> Option<f64> {
        self.learnt().wire_bytes_per_s
    }
}

impl Chooser {
    /// Begins with what others have learned. Their lost trust in a codec is not adopted: it was due
    /// to the CPU load at that time.
    #[must_use]
    pub fn experienced(self, experience: &Experience) -> Chooser {
        let Learnt { wire_bytes_per_s, codecs, zstd_of_lz4 } = *experience.learnt();
        let codecs = codecs.map(|codec| Some(CodecFigures { trust: 1.0, ..codec? }));
        Chooser { wire_bytes_per_s, codecs, zstd_of_lz4, ..self }
    }

    /// Passes on what the chooser knows; the rest stays as others saw it.
    pub fn pass_on(&self, experience: &Experience) {
        let mut learnt = experience.learnt();
        learnt.wire_bytes_per_s = self.wire_bytes_per_s.or(learnt.wire_bytes_per_s);
        for codec in Codec::ALL {
            if let (Some(own), Some(figures)) = (self.codecs[place(codec)], self.figures(codec)) {
                // Both ratios are of the same content. The load at this time is not passed on.
                let ratio = figures.ratio;
                learnt.codecs[place(codec)] = Some(CodecFigures { ratio, ..own });
            }
        }
        if self.zstd_of_lz4.value().is_some() {
            learnt.zstd_of_lz4 = self.zstd_of_lz4;
        }
    }
}
