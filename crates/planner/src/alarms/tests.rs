use proptest::prelude::*;

use super::*;

const DAY_MS: u64 = 24 * 3600 * 1000;
/// A time long after 1970.
const START_MS: u64 = 1_795_444_970_253;

/// Alarms as they are recorded, and the watch over them.
#[derive(Default)]
struct Rig {
    watch: AlarmWatch,
    raised: BTreeMap<AlarmKey, AlarmSeverity>,
}

impl Rig {
    /// Judges facts some time after the start, and carries out the verdicts. Returns them in short.
    fn at(&mut self, after_ms: u64, facts: &AlarmFacts) -> Vec<String> {
        let judged = judge(&self.watch, &self.raised, facts, START_MS + after_ms);
        self.watch = judged.watch;
        let mut short = Vec::new();
        for verdict in judged.verdicts {
            match verdict {
                AlarmVerdict::Raise(symptom) => {
                    short.push(format!("+{}", symptom.key.object));
                    let before = self.raised.insert(symptom.key, symptom.severity);
                    assert_eq!(before, None);
                }
                AlarmVerdict::Change(symptom) => {
                    short.push(format!("{} {}", symptom.severity.name(), symptom.key.object));
                    let before = self.raised.insert(symptom.key, symptom.severity);
                    assert!(before.is_some_and(|before| before != symptom.severity));
                }
                AlarmVerdict::Clear(key) => {
                    short.push(format!("-{}", key.object));
                    assert!(self.raised.remove(&key).is_some());
                }
            }
        }
        short
    }
}

fn away(name: &str) -> AlarmFacts {
    let host = HostFacts { name: name.to_owned(), ..HostFacts::default() };
    AlarmFacts { hosts: vec![host], ..AlarmFacts::default() }
}

fn vm(power: VmPower) -> AlarmFacts {
    AlarmFacts { vms: vec![VmFacts { name: "web".to_owned(), power }], ..AlarmFacts::default() }
}

fn down() -> VmPower {
    VmPower::Down { host: "a".to_owned(), state: "failed".to_owned() }
}

fn filled(percent: u64) -> AlarmFacts {
    let space = Some((100 << 30, (100 - percent) << 30));
    AlarmFacts {
        datastores: vec![DatastoreFacts { name: "fast".to_owned(), space }],
        ..AlarmFacts::default()
    }
}

fn ending(days: &[u64]) -> AlarmFacts {
    let certificate = |days: &u64| CertificateFacts {
        object: "host:a".to_owned(),
        what: "the certificate of host a".to_owned(),
        ends_unix_ms: START_MS + days * DAY_MS,
        remedy: "renew it".to_owned(),
    };
    AlarmFacts { certificates: days.iter().map(certificate).collect(), ..AlarmFacts::default() }
}

fn moving(sent_bytes: u64) -> AlarmFacts {
    let mark = MoveMark { is_running: true, sent_bytes, ..MoveMark::default() };
    let one = MoveFacts {
        id: "v1".to_owned(),
        vm: "web".to_owned(),
        from: "a".to_owned(),
        to: "b".to_owned(),
        mark,
    };
    AlarmFacts { moves: vec![one], ..AlarmFacts::default() }
}

fn ruled(broken: Option<&str>, is_unsure: bool) -> AlarmFacts {
    let rule = RuleFacts {
        name: "apart".to_owned(),
        broken: broken.map(str::to_owned),
        breakers: 2,
        is_unsure,
    };
    AlarmFacts { rules: vec![rule], ..AlarmFacts::default() }
}

fn fine() -> AlarmFacts {
    AlarmFacts::default()
}

#[test]
fn a_host_that_stays_away_raises_an_alarm_that_ends_some_time_after_its_return() {
    let mut rig = Rig::default();
    assert_eq!(rig.at(0, &away("a")), [""; 0]);
    assert_eq!(rig.at(29_999, &away("a")), [""; 0]);
    assert_eq!(rig.at(30_000, &away("a")), ["+host:a"]);
    assert_eq!(rig.at(31_000, &away("a")), [""; 0]);
    assert_eq!(rig.at(40_000, &fine()), [""; 0]);
    // It goes away again for a moment.
    assert_eq!(rig.at(60_000, &away("a")), [""; 0]);
    assert_eq!(rig.at(70_000, &fine()), [""; 0]);
    assert_eq!(rig.at(99_999, &fine()), [""; 0]);
    assert_eq!(rig.at(100_000, &fine()), ["-host:a"]);
    assert_eq!(rig.at(200_000, &fine()), [""; 0]);
}

#[test]
fn trouble_that_comes_and_goes_raises_no_alarm() {
    let mut rig = Rig::default();
    for second in 0..600 {
        let facts = if second % 20 < 15 { away("a") } else { fine() };
        assert_eq!(rig.at(second * 1000, &facts), [""; 0]);
    }
}

#[test]
fn a_vm_whose_host_is_away_neither_raises_nor_clears_an_alarm() {
    let mut rig = Rig::default();
    for minute in 0..10 {
        assert_eq!(rig.at(minute * 60_000, &vm(VmPower::Unknown)), [""; 0]);
    }
    rig.at(600_000, &vm(down()));
    assert_eq!(rig.at(630_000, &vm(down())), ["+vm:web"]);
    assert_eq!(rig.at(900_000, &vm(VmPower::Unknown)), [""; 0]);
    rig.at(910_000, &vm(VmPower::Runs));
    assert_eq!(rig.at(940_000, &vm(VmPower::Runs)), ["-vm:web"]);
    rig.at(950_000, &vm(VmPower::Missing));
    assert_eq!(rig.at(980_000, &vm(VmPower::Missing)), ["+vm:web"]);
}

#[test]
fn a_datastore_has_two_levels_that_end_lower_than_they_begin() {
    let mut rig = Rig::default();
    assert_eq!(rig.at(0, &filled(84)), [""; 0]);
    assert_eq!(rig.at(1, &filled(85)), ["+datastore:fast"]);
    assert_eq!(rig.at(2, &filled(83)), [""; 0]);
    assert_eq!(rig.at(60_000, &filled(83)), [""; 0]);
    assert_eq!(rig.at(60_001, &filled(95)), ["critical datastore:fast"]);
    assert_eq!(rig.at(60_002, &filled(93)), [""; 0]);
    assert_eq!(rig.at(60_003, &filled(92)), ["warning datastore:fast"]);
    assert_eq!(rig.at(60_004, &filled(82)), [""; 0]);
    assert_eq!(rig.at(90_004, &filled(82)), ["-datastore:fast"]);
    assert_eq!(rig.at(90_005, &filled(84)), [""; 0]);
    // Straight to the upper level.
    rig.at(90_006, &filled(100));
    assert_eq!(rig.raised.values().next(), Some(&AlarmSeverity::Critical));
}

#[test]
fn a_datastore_that_no_reachable_host_reports_keeps_its_alarm() {
    let mut rig = Rig::default();
    rig.at(0, &filled(90));
    let mut unknown = filled(90);
    unknown.datastores[0].space = None;
    assert_eq!(rig.at(1000, &unknown), [""; 0]);
    assert_eq!(rig.at(600_000, &unknown), [""; 0]);
    assert_eq!(rig.raised.len(), 1);
}

#[test]
fn the_certificate_that_ends_first_counts() {
    let mut rig = Rig::default();
    assert_eq!(rig.at(0, &ending(&[31, 400])), [""; 0]);
    assert_eq!(rig.at(DAY_MS, &ending(&[31, 400])), ["+host:a"]);
    assert_eq!(rig.at(24 * DAY_MS, &ending(&[400, 31])), ["critical host:a"]);
    let judged = judge(&rig.watch, &BTreeMap::new(), &ending(&[31]), START_MS + 32 * DAY_MS);
    let [AlarmVerdict::Raise(ended)] = &judged.verdicts[..] else { panic!("{judged:?}") };
    assert!(ended.text.contains("ended on 2026-12-24"), "{}", ended.text);
    assert_eq!(rig.at(32 * DAY_MS, &ending(&[400])), [""; 0]);
    assert_eq!(rig.at(33 * DAY_MS, &ending(&[400])), ["-host:a"]);
    let judged = judge(&AlarmWatch::default(), &BTreeMap::new(), &ending(&[20, 10]), START_MS);
    let [AlarmVerdict::Raise(first)] = &judged.verdicts[..] else { panic!("{judged:?}") };
    assert!(first.text.contains("ends on 2026-12-03"), "{}", first.text);
}

#[test]
fn a_move_is_stuck_when_nothing_of_it_changes() {
    let mut rig = Rig::default();
    for minute in 0..30 {
        assert_eq!(rig.at(minute * 60_000, &moving(minute)), [""; 0]);
    }
    assert_eq!(rig.at(38 * 60_000, &moving(29)), [""; 0]);
    assert_eq!(rig.at(39 * 60_000, &moving(29)), ["+move:v1"]);
    rig.at(40 * 60_000, &moving(30));
    assert_eq!(rig.at(41 * 60_000, &moving(31)), ["-move:v1"]);
}

#[test]
fn a_rule_whose_vms_are_not_known_keeps_its_alarm() {
    let mut rig = Rig::default();
    let why = Some("db1 on a, with db2");
    rig.at(0, &ruled(why, false));
    assert_eq!(rig.at(60_000, &ruled(why, false)), ["+rule:apart"]);
    assert_eq!(rig.at(600_000, &ruled(None, true)), [""; 0]);
    rig.at(610_000, &ruled(None, false));
    assert_eq!(rig.at(640_000, &ruled(None, false)), ["-rule:apart"]);
}

#[test]
fn a_clock_that_is_set_back_starts_the_time_again() {
    let mut rig = Rig::default();
    rig.at(3_600_000, &away("a"));
    assert_eq!(rig.at(0, &away("a")), [""; 0]);
    assert_eq!(rig.at(29_000, &away("a")), [""; 0]);
    assert_eq!(rig.at(30_000, &away("a")), ["+host:a"]);
}

#[test]
fn the_number_of_alarms_is_bounded_and_the_most_urgent_come_first() {
    let mut facts = filled(90);
    let host = |number: usize| HostFacts { name: format!("h{number}"), ..HostFacts::default() };
    facts.hosts = (0..MOST_ALARMS + 5).map(host).collect();
    let before = judge(&AlarmWatch::default(), &BTreeMap::new(), &fine(), START_MS).watch;
    let first = judge(&before, &BTreeMap::new(), &facts, START_MS);
    let judged = judge(&first.watch, &BTreeMap::new(), &facts, START_MS + 30_000);
    assert_eq!((judged.verdicts.len(), judged.left_out), (MOST_ALARMS, 6));
    let is_critical = |verdict: &AlarmVerdict| {
        matches!(verdict, AlarmVerdict::Raise(symptom)
            if symptom.severity == AlarmSeverity::Critical)
    };
    assert!(judged.verdicts.iter().all(is_critical));
}

fn any_facts() -> impl Strategy<Value = AlarmFacts> {
    let power = prop_oneof![
        Just(VmPower::Runs),
        Just(down()),
        Just(VmPower::Missing),
        Just(VmPower::Unknown)
    ];
    let parts = (any::<bool>(), power, 80_u64..=100, 0_u64..40, any::<bool>(), 0_u64..3);
    parts.prop_map(|(is_away, power, percent, days, is_broken, sent)| AlarmFacts {
        hosts: if is_away { away("a").hosts } else { Vec::new() },
        vms: vm(power).vms,
        rules: ruled(is_broken.then_some("why"), false).rules,
        datastores: filled(percent).datastores,
        certificates: ending(&[days]).certificates,
        moves: moving(sent).moves,
        ha: Vec::new(),
    })
}

proptest! {
    /// The rig asserts that each verdict suits the alarms that are raised.
    #[test]
    fn verdicts_suit_the_raised_alarms_and_texts_are_one_line(
        steps in prop::collection::vec((any_facts(), 0_u64..700_000), 1..40),
    ) {
        let (mut rig, mut now_ms) = (Rig::default(), 0);
        for (facts, passed_ms) in steps {
            now_ms += passed_ms;
            rig.at(now_ms, &facts);
            for (_, symptom) in
                symptoms::find(&facts, &rig.raised, &BTreeMap::new(), START_MS + now_ms).symptoms
            {
                prop_assert!(!symptom.text.is_empty() && !symptom.remedy.is_empty());
                prop_assert!(!symptom.text.contains('\n') && !symptom.remedy.contains('\n'));
            }
        }
        // When nothing is wrong any more, everything is cleared.
        rig.at(now_ms + 1, &fine());
        rig.at(now_ms + 1 + CLEAR_AFTER_MS, &fine());
        prop_assert!(rig.raised.is_empty());
    }

    /// A verdict that was not carried out is returned again.
    #[test]
    fn a_verdict_that_failed_comes_again(facts in any_facts()) {
        let none = BTreeMap::new();
        let first = judge(&AlarmWatch::default(), &none, &facts, START_MS);
        let due = judge(&first.watch, &none, &facts, START_MS + 700_000);
        let again = judge(&due.watch, &none, &facts, START_MS + 700_001);
        prop_assert_eq!(due.verdicts, again.verdicts);
    }
}

#[test]
fn trouble_of_the_high_availability_has_its_kind_and_a_remedy() {
    let fact = |kind: AlarmKind, object: &str| HaFacts {
        kind,
        object: object.to_owned(),
        text: "it is wrong".to_owned(),
        remedy: None,
    };
    let facts = AlarmFacts {
        ha: vec![
            fact(AlarmKind::HaDoubtful, "host:a"),
            fact(AlarmKind::HaTrouble, "vm:db"),
            fact(AlarmKind::HaUnprotected, "vm:web"),
            fact(AlarmKind::HaShortfall, "cluster:ha"),
        ],
        ..AlarmFacts::default()
    };
    let mut rig = Rig::default();
    assert_eq!(rig.at(0, &facts), ["+host:a", "+vm:db"]);
    let judged = judge(&rig.watch, &rig.raised, &facts, START_MS + 60_000);
    let raised = judged.verdicts.iter().map(|verdict| match verdict {
        AlarmVerdict::Raise(symptom) => (symptom.severity, symptom.remedy.as_str()),
        other => panic!("{other:?}"),
    });
    let raised: Vec<_> = raised.collect();
    assert_eq!(raised.len(), 2);
    assert!(raised.iter().all(|(severity, _)| *severity == AlarmSeverity::Warning));
    assert!(raised[0].1.contains("godwit vm set web"), "{raised:?}");
    assert_eq!(rig.at(60_000, &facts).len(), 2);
    assert_eq!(rig.at(61_000, &AlarmFacts::default()), [""; 0]);
    assert_eq!(rig.at(91_000, &AlarmFacts::default()).len(), 4);
}

#[test]
fn trouble_with_a_remedy_of_its_own_keeps_it() {
    let fact = HaFacts {
        kind: AlarmKind::HaDoubtful,
        object: "vm:manager".to_owned(),
        text: "it is in doubt".to_owned(),
        remedy: Some("confirm it".to_owned()),
    };
    let facts = AlarmFacts { ha: vec![fact], ..AlarmFacts::default() };
    let judged = judge(&AlarmWatch::default(), &BTreeMap::new(), &facts, START_MS);
    let [AlarmVerdict::Raise(raised)] = &judged.verdicts[..] else { panic!("{judged:?}") };
    assert_eq!((raised.severity, &*raised.remedy), (AlarmSeverity::Critical, "confirm it"));
}
