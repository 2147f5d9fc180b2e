//! QEMUs that did not answer, and when each is asked again. Pure.
//!
//! A question that was not answered stays in the queue of a monitor. So a QEMU that hangs is asked
//! less and less often, up to once in a minute.

use std::collections::BTreeMap;

use crate::load::reading::Process;

/// Most samples in a row in which a silent QEMU is not asked.
const LONGEST_PAUSE: u32 = 11;

#[derive(Debug, Default)]
struct Silence {
    /// Questions in a row without an answer.
    misses: u32,
    /// Samples in which it is not asked.
    pause: u32,
}

/// QEMUs that have not answered the last question.
#[derive(Debug, Default)]
pub(crate) struct Silences(BTreeMap<Process, Silence>);

impl Silences {
    /// Begins a sample of these processes; forgets all others. Returns those that may be asked:
    /// first those that answered last time.
    pub(crate) fn begin(&mut self, processes: &[Process]) -> Vec<Process> {
        self.0.retain(|process, _| processes.contains(process));
        let mut asked: Vec<(u32, Process)> = Vec::new();
        for process in processes {
            match self.0.get_mut(process) {
                Some(silence) if silence.pause > 0 => silence.pause -= 1,
                Some(silence) => asked.push((silence.misses, *process)),
                None => asked.push((0, *process)),
            }
        }
        asked.sort_unstable();
        asked.into_iter().map(|(_, process)| process).collect()
    }

    /// Notes that a QEMU has answered.
    pub(crate) fn answered(&mut self, process: Process) {
        self.0.remove(&process);
    }

    /// Notes that a QEMU has not answered in time. Returns whether that is new.
    pub(crate) fn missed(&mut self, process: Process) -> bool {
        let silence = self.0.entry(process).or_default();
        // 0, 1, 3, 7, then the longest.
        silence.pause = (1_u32 << silence.misses.min(5)).saturating_sub(1).min(LONGEST_PAUSE);
        silence.misses = silence.misses.saturating_add(1);
        silence.misses == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANGS: Process = (7, 1);
    const WELL: Process = (8, 1);

    #[test]
    fn a_silent_qemu_is_asked_less_and_less_often() {
        let mut silences = Silences::default();
        let mut asked_at = Vec::new();
        for sample in 0..40 {
            let asked = silences.begin(&[HANGS, WELL]);
            assert!(asked.contains(&WELL));
            if asked.contains(&HANGS) {
                asked_at.push(sample);
                let is_last = asked.last() == Some(&HANGS);
                assert!(is_last || sample == 0, "it delays others");
                assert_eq!(silences.missed(HANGS), sample == 0);
            }
            silences.answered(WELL);
        }
        assert_eq!(asked_at, [0, 1, 3, 7, 15, 27, 39]);
    }

    #[test]
    fn an_answer_ends_the_silence_and_an_ended_process_is_forgotten() {
        let mut silences = Silences::default();
        for _ in 0..3 {
            silences.begin(&[HANGS]);
            silences.missed(HANGS);
        }
        silences.answered(HANGS);
        assert_eq!(silences.begin(&[HANGS]), [HANGS]);
        assert!(silences.missed(HANGS), "a new silence");
        silences.begin(&[WELL]);
        assert!(silences.0.is_empty());
        assert_eq!(silences.begin(&[HANGS]), [HANGS]);
    }
}
