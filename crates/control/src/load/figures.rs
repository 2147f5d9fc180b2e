//! Figures of an object over one period: in 16 bits each, and merged into longer periods. Pure.

use godwit_api::control::LoadMetric;
use godwit_qemu::Uuid;

/// Number of figures of an object.
pub(crate) const FIGURES: usize = 12;
/// Place of the memory in use among the figures; of a datastore, the space in use.
pub(crate) const USED: usize = 2;
/// Place of the reads a second.
pub(crate) const READS: usize = 5;
/// Place of the writes a second.
pub(crate) const WRITES: usize = 6;
/// Place of the bytes read a second.
pub(crate) const READ_BYTES: usize = 7;
/// Place of the bytes written a second.
pub(crate) const WRITE_BYTES: usize = 8;
/// Place of the mean time of a read or write.
pub(crate) const LATENCY: usize = 9;

/// Names of the figures, in their order.
const METRICS: [LoadMetric; FIGURES] = [
    LoadMetric::CpuUsedMillicores,
    LoadMetric::CpuReadyMillicores,
    LoadMetric::MemoryUsedBytes,
    LoadMetric::MemoryBalloonedBytes,
    LoadMetric::DirtyBytesPerS,
    LoadMetric::ReadsPerS,
    LoadMetric::WritesPerS,
    LoadMetric::ReadBytesPerS,
    LoadMetric::WriteBytesPerS,
    LoadMetric::LatencyUs,
    LoadMetric::RxBytesPerS,
    LoadMetric::TxBytesPerS,
];

/// Object whose load is kept.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Object {
    /// A VM by its guest's UUID, so that a move or a new name does not end its history.
    Vm(Uuid),
    /// A host by its name.
    Host(String),
    /// A datastore by its ID.
    Datastore(String),
    /// All hosts together.
    Cluster,
}

impl Object {
    /// Returns the text that identifies the object.
    pub(crate) fn label(&self) -> String {
        match self {
            Object::Vm(uuid) => format!("vm:{uuid}"),
            Object::Host(name) => format!("host:{name}"),
            Object::Datastore(id) => format!("datastore:{id}"),
            Object::Cluster => "cluster".to_owned(),
        }
    }

    /// Returns the names of the object's figures.
    pub(crate) fn metrics(&self) -> [LoadMetric; FIGURES] {
        let mut metrics = METRICS;
        if let (Object::Datastore(_), Some(used)) = (self, metrics.get_mut(USED)) {
            *used = LoadMetric::SpaceUsedBytes;
        }
        metrics
    }
}

/// Figures in their order; none: not measured.
pub(crate) type Figures = [Option<u64>; FIGURES];

/// A figure in 16 bits: exact below 2,048, and within 1/2,048 of the value above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compact(u16);

impl Compact {
    /// Figure that was not measured.
    pub(crate) const UNKNOWN: Compact = Compact(u16::MAX);
    /// Code of the largest value: 11 bits of it, shifted by 53.
    const MOST: u16 = 53 * 1_024 + 2_047;

    /// Rounds a figure.
    pub(crate) fn of(figure: Option<u64>) -> Compact {
        let Some(value) = figure else { return Compact::UNKNOWN };
        // The highest 11 bits are kept.
        let shift_of = |value: u64| (u64::BITS - value.leading_zeros()).saturating_sub(11);
        let half = (1_u64 << shift_of(value)) >> 1;
        let rounded = value.saturating_add(half);
        let shift = shift_of(rounded);
        let code = u64::from(shift) * 1_024 + (rounded >> shift);
        Compact(u16::try_from(code).unwrap_or(Compact::MOST))
    }

    /// Returns the rounded figure; none: not measured, or no valid code.
    pub(crate) fn value(self) -> Option<u64> {
        let code = u64::from(self.0);
        match self.0 {
            0..2_048 => Some(code),
            2_048..=Compact::MOST => {
                let shift = code / 1_024 - 1;
                Some((code - shift * 1_024) << shift)
            }
            _ => None,
        }
    }

    pub(crate) fn code(self) -> u16 {
        self.0
    }

    pub(crate) fn from_code(code: u16) -> Compact {
        Compact(code)
    }
}

/// Mean and highest value of each figure in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) mean: [Compact; FIGURES],
    pub(crate) max: [Compact; FIGURES],
}

impl Row {
    /// Row in which nothing was measured.
    pub(crate) const EMPTY: Row =
        Row { mean: [Compact::UNKNOWN; FIGURES], max: [Compact::UNKNOWN; FIGURES] };

    /// Returns the row of a single sample.
    pub(crate) fn of(figures: &Figures) -> Row {
        let mean = figures.map(Compact::of);
        Row { mean, max: mean }
    }
}

/// Rows merged into one of a longer period.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sum {
    totals: [u128; FIGURES],
    counts: [u64; FIGURES],
    max: Figures,
}

impl Sum {
    pub(crate) fn add(&mut self, row: &Row) {
        let means = row.mean.iter().zip(self.totals.iter_mut().zip(&mut self.counts));
        for (mean, (total, count)) in means {
            if let Some(mean) = mean.value() {
                *total += u128::from(mean);
                *count += 1;
            }
        }
        for (one, most) in row.max.iter().zip(&mut self.max) {
            *most = one.value().max(*most);
        }
    }

    /// Returns the row of everything that was added; none: nothing was measured.
    pub(crate) fn row(&self) -> Option<Row> {
        if self.counts.iter().all(|count| *count == 0) {
            return None;
        }
        let mut row = Row { max: self.max.map(Compact::of), ..Row::EMPTY };
        for (mean, (total, count)) in row.mean.iter_mut().zip(self.totals.iter().zip(self.counts)) {
            let whole = total.checked_div(u128::from(count));
            *mean = Compact::of(whole.and_then(|mean| u64::try_from(mean).ok()));
        }
        Some(row)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_figure_is_kept_within_a_two_thousandth(value: u64) {
            let kept = Compact::of(Some(value)).value().unwrap();
            prop_assert!(kept.abs_diff(value) <= value / 2_048, "{value} became {kept}");
            // A kept figure does not change again.
            prop_assert_eq!(Compact::of(Some(kept)).value(), Some(kept));
        }

        #[test]
        fn the_order_of_figures_is_kept(one: u64, other: u64) {
            let (less, more) = (one.min(other), one.max(other));
            prop_assert!(Compact::of(Some(less)).code() <= Compact::of(Some(more)).code());
        }

        #[test]
        fn every_code_is_read(code: u16) {
            let compact = Compact::from_code(code);
            if compact.value().is_some() {
                prop_assert_eq!(Compact::of(compact.value()), compact);
            }
        }

        #[test]
        fn a_merged_row_has_mean_and_maximum(values in prop::collection::vec(0..2_000_u64, 1..50)) {
            let mut sum = Sum::default();
            for value in &values {
                sum.add(&Row::of(&[Some(*value); FIGURES]));
            }
            let row = sum.row().unwrap();
            let mean = values.iter().sum::<u64>() / values.len() as u64;
            prop_assert_eq!(row.mean[0].value(), Some(mean));
            prop_assert_eq!(row.max[FIGURES - 1].value(), values.iter().max().copied());
        }
    }

    #[test]
    fn what_was_not_measured_stays_unknown() {
        assert_eq!(Compact::of(None).value(), None);
        assert_eq!(Sum::default().row(), None);
        let mut sum = Sum::default();
        let mut figures = [None; FIGURES];
        sum.add(&Row::of(&figures));
        assert_eq!(sum.row(), None);
        figures[0] = Some(7);
        sum.add(&Row::of(&figures));
        let row = sum.row().unwrap();
        assert_eq!((row.mean[0].value(), row.max[0].value()), (Some(7), Some(7)));
        assert_eq!(row.mean[1], Compact::UNKNOWN);
    }

    #[test]
    fn each_object_has_its_own_label() {
        let vm = Object::Vm(Uuid::nil());
        assert_eq!(vm.label(), "vm:00000000-0000-0000-0000-000000000000");
        let datastore = Object::Datastore("x".into());
        assert_eq!(datastore.metrics()[USED], LoadMetric::SpaceUsedBytes);
        assert_eq!(vm.metrics()[LATENCY], LoadMetric::LatencyUs);
        assert_eq!(vm.metrics()[READS], LoadMetric::ReadsPerS);
        assert_eq!(vm.metrics()[WRITES], LoadMetric::WritesPerS);
        assert_eq!(vm.metrics()[READ_BYTES], LoadMetric::ReadBytesPerS);
        assert_eq!(vm.metrics()[WRITE_BYTES], LoadMetric::WriteBytesPerS);
    }
}
